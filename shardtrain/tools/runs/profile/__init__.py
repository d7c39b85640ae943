"""What a profiler trace of a run says: the costliest operations, exposed communication, and memory over time."""
