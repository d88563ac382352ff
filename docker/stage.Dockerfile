# Every image of this project: which one is a matter of build arguments (flows/images/table.py has the
# table; `geb images build` passes them). Builds with the classic builder and with BuildKit, needs
# no network: all packages come from the wheelhouse image, which is made on the host.
#
#   BASE        any Debian with a python3 that has venv, of the version that made the wheelhouse
#   WHEELS      image that holds nothing but wheels: /*.whl, and in /build what builds this package
#   PYTHON_VERSION  what that version is
#   UID, GID    user and group of whatever runs here
#   TORCHDYNAMO_DISABLE  1: no compiler here, so torch must not want one
#   PACKAGES    Debian packages that the stage needs at run time (wants a network)
ARG BASE=python:3.11-slim
ARG WHEELS
FROM ${WHEELS} AS wheels

# The dependencies: this layer changes with the wheelhouse alone.
FROM ${BASE} AS dependencies
ARG PYTHON_VERSION=3.11
RUN python3 -c "import sys; v = '%d.%d' % sys.version_info[:2]; \
    sys.exit(v != '${PYTHON_VERSION}' and 'the base has Python ' + v + ', the wheels are for ${PYTHON_VERSION}')"
COPY --from=wheels / /wheels/
RUN python3 -m venv /opt/pip \
 && /opt/pip/bin/pip install --quiet --no-index --no-deps /wheels/build/*.whl \
 && python3 -m venv --without-pip /opt/geb \
 && /opt/pip/bin/pip --python /opt/geb/bin/python install --quiet --no-index --no-deps \
      --no-warn-script-location /wheels/*.whl

# The project's own code: a change of it rebuilds from here, in seconds.
FROM dependencies AS code
COPY . /src/
RUN /opt/pip/bin/pip install --quiet --no-index --no-deps --no-build-isolation \
      --target /opt/code /src \
 && sed --in-place '1s|.*|#!/opt/geb/bin/python|' /opt/code/bin/geb

FROM ${BASE}
ARG PACKAGES=""
RUN if [ -n "${PACKAGES}" ]; then \
      apt-get update && apt-get install --yes --no-install-recommends ${PACKAGES} \
      && rm -rf /var/lib/apt/lists/*; \
    fi
ARG UID=10001
ARG GID=10001
# Stores and inputs are mounted at the path that they have on the host, which may be below /root.
RUN groupadd --gid "${GID}" geb \
 && useradd --uid "${UID}" --gid "${GID}" --no-create-home --home-dir /tmp geb \
 && chmod 711 /root
COPY --from=dependencies /opt/geb /opt/geb
ARG TORCHDYNAMO_DISABLE=""
ENV PATH=/opt/geb/bin:/opt/code/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONPATH=/opt/code \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    TORCHDYNAMO_DISABLE=${TORCHDYNAMO_DISABLE}
WORKDIR /opt/code
CMD ["python", "-m", "stages.contract.supervisor", "--help"]
USER ${UID}:${GID}
COPY --from=code /opt/code /opt/code
