"""Look-back search: embeddings of stored pictures, and the nearest of them (`docs/stores.md`)."""
