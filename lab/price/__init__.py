"""The price of turns, counted by hooks on the model: ``python -m lab.price chats``, ``agents``, ``http``."""
