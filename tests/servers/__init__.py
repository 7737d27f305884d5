"""Servers that tests start: Redis or Valkey, S3, Mooncake."""
