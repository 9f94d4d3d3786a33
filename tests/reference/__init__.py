"""Textbook twins in float64, written from the definitions and used by tests only."""
