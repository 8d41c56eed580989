"""Training commands of other frameworks as verlite commands.

Each framework has a file with a table: one row per setting, what becomes of it, and why. `engine`
applies a table, and `text` writes the result as a command or as a YAML file. Nothing that is read
is executed.
"""
