# Both commands of README.md: `docker build --target tests .`. The last stage runs pycollective.
FROM debian:bookworm-slim AS base
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends \
      ca-certificates g++ git iproute2 python3-dev python3-venv && \
    rm -rf /var/lib/apt/lists/*
WORKDIR /pycollective

FROM base AS demo
COPY . .
RUN python3 -m venv .venv && .venv/bin/pip install '.[demo]' && .venv/bin/pycollective train

FROM demo AS tests
RUN python3 -m venv .venv && .venv/bin/pip install '.[test]' && .venv/bin/pytest

FROM demo
ENTRYPOINT [".venv/bin/pycollective"]
CMD ["--help"]
