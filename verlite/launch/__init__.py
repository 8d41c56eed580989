"""Start and stop Ray on several nodes, and write the scripts that cluster managers run."""
