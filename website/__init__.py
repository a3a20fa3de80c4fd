"""The documentation site: its pages are made from the repository, and MkDocs builds the site from them."""
