# Every image of this project: which one is a matter of build arguments (flows/images/table.py has the
# table; `geb images build` passes them). Builds with the classic builder and with BuildKit, needs
# no network: all packages come from the wheelhouse image, which is made on the host.
#
#   BASE        any Debian with a python3 that has venv, of the version that made the wheelhouse
#   WHEELS      image that holds nothing but wheels
#   PYTHON_VERSION  what that version is
#   VERSION     version of this project
#   LEFT_OUT    packages of this project that nothing here runs
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
 && python3 -m venv --without-pip /opt/geb \
 && /opt/pip/bin/pip --python /opt/geb/bin/python install --quiet --no-index --no-deps \
      --no-warn-script-location /wheels/*.whl

# The project's own code, its version, and its command: a change rebuilds from here, in seconds.
FROM dependencies AS code
COPY . /opt/code/
ARG LEFT_OUT=""
ARG VERSION
RUN cd /opt/code && rm -rf docker ${LEFT_OUT} && chmod -R a+rX,go-w . \
 && mkdir /opt/code/bin "/opt/code/geb-${VERSION}.dist-info" \
 && printf 'Metadata-Version: 2.1\nName: geb\nVersion: %s\n' "${VERSION}" \
      >"/opt/code/geb-${VERSION}.dist-info/METADATA" \
 && printf '#!/opt/geb/bin/python\nfrom flows.commands.cli import main\n\nmain()\n' >/opt/code/bin/geb \
 && chmod 755 /opt/code/bin/geb \
 && /opt/geb/bin/python -m compileall -q /opt/code

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
CMD ["python", "-m", "stages.harness.supervisor", "--help"]
USER ${UID}:${GID}
COPY --from=code /opt/code /opt/code
