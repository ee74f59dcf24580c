"""The two chapters of The Straight Dope."""
