"""Agents' sessions replayed under their own retention rules: what each way of caching prefills for them."""
