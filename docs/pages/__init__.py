"""The pages of docs/reference, one module each: `render()` gives the page as text, from the package's own tables."""
