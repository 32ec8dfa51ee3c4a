"""Device code: one kernel family a file, with its tile choice and launcher."""
