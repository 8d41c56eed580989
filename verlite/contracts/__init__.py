"""`verlite contract`: do functions and environments of a user keep the promises of their kind?"""
