// Code and tables that scroll sideways take the focus, so that a keyboard can scroll them.
addEventListener("load", () => {
  const mark = () => {
    for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .diagram, pre > code")) {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    }
  };
  mark();
  addEventListener("resize", mark);
  setTimeout(mark, 100);
});
