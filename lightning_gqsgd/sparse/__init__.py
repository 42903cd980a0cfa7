"""Row-sparse gradients of embeddings: how ranks send the rows that a batch has touched.

The hook calls one entry point, `gradients.SparseGradients`. Every other file has one reason to exist: `options` (fields
and refusals), `tables` (a table and its touched rows), `row_numbers` (how row numbers are written), `rows` (how rows
are written), `logarithmic` (rows as powers of a base), `gathering` (the exchange of messages), `sketching` (sums of
sketches), `missing` (a rank that has not used a table).
"""
