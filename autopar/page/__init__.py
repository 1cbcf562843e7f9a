"""The report as one self-contained page: HTML, styles and drawings, without a network."""

from autopar.page.page import page_text, write_page

__all__ = ["page_text", "write_page"]
