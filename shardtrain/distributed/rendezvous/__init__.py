"""How the ranks of a run find each other: stores, their signatures, and sockets that no other user can use."""
