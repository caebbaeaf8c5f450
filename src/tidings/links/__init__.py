"""The link worker: imports the exports of linked spaces."""
