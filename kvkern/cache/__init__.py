"""Cache objects: storage, pages, prefixes, and one step's batch."""
