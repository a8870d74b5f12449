"""`skinny report`: one HTML page and its SVG files from plans and committed rows. Measures nothing, needs no GPU."""
