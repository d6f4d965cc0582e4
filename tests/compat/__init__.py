"""kvtier against the packages whose decisions it repeats. Each test needs the package it names: see Makefile."""
