"""Ownership of objects: keyed names, encryption, and tenants."""
