"""Objects in a store, on fsspec: put, ranged get, fresh list, delete, upload, download."""
