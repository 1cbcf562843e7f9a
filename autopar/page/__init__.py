"""The report as one self-contained HTML page with styles and diagrams, usable offline."""

from autopar.page.page import page_text, write_page

__all__ = ["page_text", "write_page"]
