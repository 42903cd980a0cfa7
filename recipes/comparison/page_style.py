"""The style sheet of a comparison's page: light and dark, wide and narrow."""

from recipes.comparison.embedding import NARROW, on_dark

#: Background of the page, the same as that of its pictures.
PAPER = "#ffffff"

STYLE = f"""
:root{{color-scheme:light dark;--paper:{PAPER};--ink:#1c1f24;--soft:#5c6470;--line:#e3e6ea;--fill:#f3f4f6;
--good:#a84300}}
@media (prefers-color-scheme:dark){{:root{{--paper:{on_dark(PAPER)};--ink:#ebebeb;--soft:#a9b0bb;--line:#363a40;
--fill:#26292e;--good:#ff9a57}}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;max-width:1080px;padding:40px 28px 60px;font:15px/1.5 system-ui,"Segoe UI","DejaVu Sans",sans-serif;
color:var(--ink);background:var(--paper)}}
h1{{font-size:28px;line-height:1.2;margin:0 0 12px;letter-spacing:-.01em}}
h2{{font-size:20px;margin:0 0 14px}}
h3{{font-size:15px;margin:30px 0 8px;color:var(--soft);font-weight:600}}
.facts{{margin:0 0 10px;display:flex;flex-wrap:wrap;gap:6px}}
.facts span{{background:var(--fill);border-radius:999px;padding:2px 12px;font-size:13px}}
pre{{background:var(--fill);border:1px solid var(--line);border-radius:8px;padding:10px 14px;font-size:12.5px;
white-space:pre-wrap;overflow-wrap:anywhere;margin:14px 0 0}}
section{{border-top:1px solid var(--line);margin-top:32px;padding-top:28px}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(200px,1fr));gap:12px;margin-bottom:24px}}
.tile{{border:1px solid var(--line);border-radius:10px;padding:12px 16px;font-size:13.5px;color:var(--soft)}}
.tile b{{display:block;font-size:24px;line-height:1.25;color:var(--ink);font-variant-numeric:tabular-nums}}
.tile.good b{{color:var(--good)}}
.tabs{{display:flex;flex-wrap:wrap;margin-top:18px}}
.tabs input{{position:absolute;opacity:0}}
.tabs label{{padding:5px 14px;border:1px solid var(--line);border-left-width:0;font-size:13.5px;cursor:pointer;
color:var(--soft)}}
.tabs label:first-of-type{{border-left-width:1px;border-radius:7px 0 0 7px}}
.tabs label:last-of-type{{border-radius:0 7px 7px 0}}
.tabs input:checked+label{{background:var(--ink);border-color:var(--ink);color:var(--paper)}}
.tabs input:focus-visible+label{{outline:2px solid var(--good);outline-offset:2px}}
.tabs figure{{display:none;width:100%;order:1}}
.tabs input:nth-of-type(1):checked~figure:nth-of-type(1),.tabs input:nth-of-type(2):checked~figure:nth-of-type(2),
.tabs input:nth-of-type(3):checked~figure:nth-of-type(3){{display:block}}
figure{{margin:16px 0 0}}
figure img{{width:100%;height:auto;display:block}}
figure.bars{{max-width:820px;margin-top:0}}
.wide{{overflow-x:auto}}
.wide:focus-visible{{outline:2px solid var(--good)}}
table{{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums;width:100%}}
th,td{{text-align:right;padding:7px 10px;border-bottom:1px solid var(--line);white-space:nowrap}}
thead th{{color:var(--soft);font-weight:600;white-space:normal;vertical-align:bottom;min-width:6.5em}}
tbody th{{font-weight:inherit}}
th:first-child,td:first-child{{text-align:left;position:sticky;left:0;background:var(--paper)}}
th i{{display:inline-block;width:9px;height:9px;border-radius:50%;margin-right:8px;background:var(--light)}}
@media (prefers-color-scheme:dark){{th i{{background:var(--dark)}}}}
footer{{margin-top:36px;font-size:12.5px;color:var(--soft);max-width:100ch}}
@media (max-width:{NARROW}px){{body{{padding:24px 16px 40px}}h1{{font-size:22px}}.tile b{{font-size:21px}}
.tabs label{{padding:5px 10px;font-size:13px}}}}
"""
