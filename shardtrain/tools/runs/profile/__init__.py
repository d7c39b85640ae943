"""Summary of a profiler trace: costliest operations, exposed communication, and memory over time."""
