"""How the documentation becomes a site: `make site`."""

project = "TBA"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "TBA"
html_show_sourcelink = False
html_copy_source = False
myst_heading_anchors = 3
exclude_patterns = ["site"]
