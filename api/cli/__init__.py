"""The command line: what a terminal shows of the compiler and the runner."""
