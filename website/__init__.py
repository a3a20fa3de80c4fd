"""The documentation site. Its pages are made from files of the repository, and MkDocs builds the site."""
