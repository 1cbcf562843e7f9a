"use strict";
// The theme: what the system has, or one of two.
const theme = document.getElementById("theme");
const themes = ["auto", "light", "dark"];
theme.hidden = false;
theme.addEventListener("click", () => {
  const next = themes[(themes.indexOf(document.documentElement.dataset.theme || "auto") + 1) % themes.length];
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  theme.textContent = "theme: " + next;
});

// The axis that gives the mesh its colors.
const colors = ["c0", "c1", "c2", "c4", "c3", "c6", "c7", "c5"];
const choice = document.querySelector(".choice");
if (choice) {
  choice.hidden = false;
  choice.addEventListener("click", (event) => {
    const axis = event.target.dataset.axis;
    if (!axis) return;
    for (const button of choice.querySelectorAll("button")) {
      button.setAttribute("aria-pressed", String(button === event.target));
    }
    for (const cell of document.querySelectorAll("#mesh .cell")) {
      const index = Number(cell.dataset[axis] || 0);
      cell.classList.remove(...colors);
      cell.classList.add(colors[index % colors.length]);
      cell.querySelector(".place").textContent = axis + " " + index;
    }
  });
}

// Printed with everything unfolded.
const folded = [];
addEventListener("beforeprint", () => {
  for (const each of document.querySelectorAll("details:not([open])")) {
    folded.push(each);
    each.open = true;
  }
});
addEventListener("afterprint", () => {
  for (const each of folded.splice(0)) each.open = false;
});
