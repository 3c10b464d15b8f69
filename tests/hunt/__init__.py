"""The search for runs that break a promise: drawn at random, held against an oracle, shrunk to the fewest pieces."""
