"""Bugs to plant, each with the test that must see it. `python -m tests.mutants` (make mutants) plants them one by one."""
