"""A setting becomes the objects of a run: `setup` puts them together, `recipe` reads them from a Config."""
