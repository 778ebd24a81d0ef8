"""Programs that look for what is not theirs, and that reach for the network."""

from __future__ import annotations

# Reads all that it can but the system's own programs, and says where the word it was given
# stands, in a content or a name; then, which of the further paths can be reached at all.
SEARCH = r"""
import os, sys
# Split, so that it is not found in this program's own command line.
needle = (sys.argv[1] + sys.argv[2]).encode()
for folder, folders, names in os.walk("/"):
    if folder == "/":
        folders[:] = [name for name in folders if name not in ("usr", "proc")]
    for name in names:
        path = os.path.join(folder, name)
        try:
            if needle in os.fsencode(path) or (
                os.path.isfile(path) and needle in open(path, "rb").read(2**24)
            ):
                print("found in", path)
        except OSError:
            pass
for name in os.listdir("/proc"):
    if name.isdecimal():
        for file in ("environ", "cmdline", "mountinfo", "cgroup", "maps", "status"):
            try:
                if needle in open(f"/proc/{name}/{file}", "rb").read():
                    print("found in", name, file)
            except OSError:
                pass
for path in sys.argv[3:]:
    try:
        if os.path.isdir(path):
            os.listdir(path)
        else:
            open(path, "rb").read(1)
        print("reached", path)
    except OSError:
        pass
"""

# Says what it finds in its directories that no checkout has put there, and leaves something.
LEAVE = r"""
import os
for place in (".", os.environ["TEMPORARY_DIRECTORY"], os.environ["HOME"], "/tmp", "/dev/shm"):
    for name in sorted(os.listdir(place)):
        if name != "README" or open("README").read() != "an evaluator\n":
            print("found", place, name)
    with open(os.path.join(place, "left"), "w") as file:
        file.write("left")
with open("README", "w") as file:
    file.write("changed")
"""

# Tells which of the addresses can be connected to. Each is `HOST PORT`, `@NAME` for an abstract
# UNIX socket, or a path.
CONNECT = r"""
import errno, socket, sys

def attempt(family, kind, address):
    try:
        with socket.socket(family, kind) as one:
            one.settimeout(3)
            one.connect(address)
            if kind == socket.SOCK_DGRAM:
                one.send(b"x")
            return "connected"
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))

for text in sys.argv[1:]:
    host, _, port = text.partition(" ")
    if port:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            print(text, kind.name, attempt(family, kind, (host, int(port))))
    else:
        name = "\0" + host[1:] if host.startswith("@") else host
        print(text, attempt(socket.AF_UNIX, socket.SOCK_STREAM, name))
try:
    print("resolved", socket.getaddrinfo("example.org", 80)[0][4])
except socket.gaierror:
    print("no names")
"""

# Has a child connect to it at the loopback interface's addresses.
SERVE = r"""
import os, socket
for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
    with socket.create_server((host, 0), family=family) as server:
        if os.fork() == 0:
            with socket.create_connection(server.getsockname()[:2]) as one:
                one.sendall(b"hello")
            os._exit(0)
        print(server.accept()[0].recv(5).decode())
        os.wait()
"""

# Names by file blocks, again and again, a path that leads now here and now there: a directory
# and a file are exchanged for links all the while. The first argument is where the links lead.
SWAP = r"""
import os, sys, threading

outside, name = os.path.split(sys.argv[1])
mark = {kind: os.environb[b"EVALUATION_FILE_" + kind] for kind in (b"BEGIN", b"END")}
os.mkdir("own")
for place in ("own/" + name, "file"):
    with open(place, "w") as file:
        file.write("own")
os.symlink(outside, "link")
os.symlink(sys.argv[1], "other")
going = True

def swap():
    while going:
        for one, two in (("own", "link"), ("file", "other")):
            os.rename(one, "aside")
            os.rename(two, one)
            os.rename("aside", two)

threading.Thread(target=swap, daemon=True).start()
for number in range(300):
    path = ("own/" + name if number % 2 else "file").encode()
    os.write(1, b"\n%s\nX-SEGI-As: path\nContent-Disposition: attachment; filename=x\n\n%s\n%s\n"
             % (mark[b"BEGIN"], path, mark[b"END"]))
going = False
"""

# What can be had of the first process in the sandbox, whose user this is as well.
SHELL_MOUNT_POINT = r"""
import os
for name in ("mem", "environ", "fd", "maps", "syscall", "stack", "exe", "root", "cwd"):
    path = "/proc/1/" + name
    try:
        if name in ("exe", "root", "cwd"):
            os.readlink(path)
        elif os.path.isdir(path):
            os.listdir(path)
        else:
            os.close(os.open(path, os.O_RDWR if name == "mem" else os.O_RDONLY))
            if name in ("maps", "syscall"):
                open(path).read()
        print(name)
    except OSError:
        pass
"""
