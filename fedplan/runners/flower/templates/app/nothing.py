"""Nothing of this app runs: every end runs the fedplan that it has installed."""

raise SystemExit("this app is of fedplan: start a site by `fedplan site serve`")
