"""The parts of scripts/mutants.py: places for mutants, the choice among them, and how they are tested."""
