"""The leaderboard: rows of results that anyone can add to, and what is made of them.

`rows` checks and merges files of rows, `curves` reads values off between measured points, `markdown` and `page` show them.
"""
