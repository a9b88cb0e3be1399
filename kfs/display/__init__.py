"""Display: text, tables and charts of objects, progress lines, and suggestions for names that do not exist."""
