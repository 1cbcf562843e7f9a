"""A generated program written as a folder, built in a process, and run by ranks that are watched."""
