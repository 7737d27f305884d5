"""Whose objects they are: keyed names, encryption, tenants, and the rotation of their keys."""
