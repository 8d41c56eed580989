"""The page of one or several runs: an HTML file that needs neither a network nor a server."""
