"""Ownership of objects: keyed names, encryption, tenants, and key rotation."""
