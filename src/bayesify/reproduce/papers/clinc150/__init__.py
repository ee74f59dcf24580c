"""Adapters of a small encoder on CLINC150, and what lies outside of its intents."""
