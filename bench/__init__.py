"""Measurements. Every number in the README comes from here, with its machine, date and command."""
