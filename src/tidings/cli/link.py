"""`tidings link`: its commands, in the order in which help shows them; each module says what its own are for."""

from __future__ import annotations

from tidings.cli import link_change, link_control, link_invite, link_people, link_quarantine, link_repair, link_show
from tidings.cli.context import Group

app = Group(help="Links with other spaces: agree on one, list, watch, pause, compare, mend and end them.")
app.command("invite")(link_invite.invite)
app.command("accept")(link_invite.accept)
app.command("list")(link_show.list_links)
app.command("show")(link_show.show)
app.command("people")(link_people.people)
app.command("set")(link_change.change)
app.command("renew")(link_change.renew)
app.command("pause")(link_control.pause)
app.command("resume")(link_control.resume)
app.command("verify")(link_repair.verify)
app.command("rebuild")(link_repair.rebuild)
app.command("remove")(link_control.remove)
app.command("run")(link_control.run)
app.add_typer(link_quarantine.app, name="quarantine")
