"""What people look at: the heat map in a terminal, the HTML page, the PNG."""
