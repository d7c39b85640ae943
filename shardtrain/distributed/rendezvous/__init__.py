"""Rendezvous of the ranks: stores, signatures of their values, and sockets protected from other users."""
