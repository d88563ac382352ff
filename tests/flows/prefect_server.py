"""A Prefect server of a test's own."""


class Server:
    """A server on loopback that can be stopped and started again.

    Args:
        home: Its folder: database and log.
        environment: Variables added to this process's.
    """

    def __init__(self, home, **environment):
        # Here: Prefect takes seconds to load, and most tests do without it.
        from flows.standing.server import free_port

        self._log = home / "server.log"
        self._address = f"http://127.0.0.1:{free_port()}"
        self.api = f"{self._address}/api"
        # It is to be a server with its own database, not a client of another.
        self._environment = {"PREFECT_HOME": str(home), "PREFECT_API_URL": ""} | environment

    def start(self):
        """Starts it and waits until it answers."""
        from flows.standing.server import start_server

        self._process = start_server(self._address, self._log, self._environment)

    def stop(self):
        """Ends it; its database stays."""
        self._process.communicate()
