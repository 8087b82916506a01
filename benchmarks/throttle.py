"""A TCP proxy on loopback whose bandwidth can be changed while it runs.

    python benchmarks/throttle.py LISTEN_PORT TARGET_PORT RATE_FILE

RATE_FILE holds bytes per second for what clients send; it is read again five
times a second, so replace it whole. What the server answers is not limited.
"""

import asyncio
import sys
from pathlib import Path

PIECE_BYTES = 64 << 10


class Bucket:
    """Lets bytes through at the rate that the file says now, all connections together."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._free_s = 0.0
        self._rate = 0.0
        self._read_s = -1.0

    async def take(self, num_bytes: int) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._read_s > 0.2:
            self._rate, self._read_s = float(self._path.read_text()), now_s
        start_s = max(self._free_s, now_s)
        self._free_s = start_s + num_bytes / self._rate
        if start_s > now_s:
            await asyncio.sleep(start_s - now_s)


async def pump(reader, writer, bucket) -> None:
    try:
        while data := await reader.read(PIECE_BYTES):
            if bucket:
                await bucket.take(len(data))
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def serve(listen_port: int, target_port: int, rate_file: Path) -> None:
    bucket = Bucket(rate_file)

    async def handle(reader, writer) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", target_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, there_writer, bucket), pump(there_reader, writer, None))

    server = await asyncio.start_server(handle, "127.0.0.1", listen_port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
