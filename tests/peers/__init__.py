"""Agreement with other frameworks where they are right, and the documented difference where they are not."""
