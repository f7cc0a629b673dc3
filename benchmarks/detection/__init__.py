"""How often trainvet is right: healthy recipes, faults put into them, and what is said about both."""
