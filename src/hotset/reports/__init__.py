"""Tables, terminal heat maps, pictures and pages."""
