"""The documentation site: a script that writes its pages from the repository, and MkDocs on them."""
