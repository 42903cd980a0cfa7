// What can be scrolled sideways can be reached with the keyboard, and the search has a name.
window.addEventListener("load", () => {
  for (const region of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) region.tabIndex = 0;
  for (const dialog of document.querySelectorAll(".md-search[role=dialog]")) dialog.setAttribute("aria-label", "Search");
});
